"""Expert parallelism on an engine that moves tokens between ranks, around experts that know of one rank alone."""
