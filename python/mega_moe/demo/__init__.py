"""The demonstration job `mega-moe train`: a small mixture-of-experts language model on text that every machine has.

Read in this order: `config` (all numbers), `model` (plain PyTorch plus one `MegaMoE` module per layer), `corpus`
(text), `parallel` (experts over ranks, the rest with FSDP2, one gradient norm over both), `checkpoint`, `trainer` (one
step), `train` (the loop), `report` (what a run leaves behind).
"""
