"""Backends and the choice between them: build and nbytes > choice > deep_gemm, fused, plain > group, routing."""
