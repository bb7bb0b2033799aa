"""The grouped GEMMs of an installed DeepGEMM, between the dispatch and the combine of the plain backends."""
