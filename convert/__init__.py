"""Conversion of drafters between PyTorch or TensorRT-LLM checkpoints and MLX.

Every file is read as data: nothing in a checkpoint is ever looked up, imported or called.
"""
