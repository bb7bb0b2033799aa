"""`mega-moe bench step`: full training steps of models with MoE layers, backend by backend.

Read in this order: `shapes` (models, FLOPs, what fits), `model` (the transformer), `measure` (one backend's steps),
`command` (words, table).
"""
