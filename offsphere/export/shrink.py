"""x / |x|**exponent as a module of sentence-transformers, for exponents other than 0 and 1.

An export with such an exponent has a copy of this file, so that it needs no offsphere.
"""

from __future__ import annotations

import torch
from sentence_transformers.base.modules import Module


class Shrink(Module):
    """Divides an embedding by a power of its own norm."""

    config_keys = ["exponent"]  # noqa: RUF012

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.exponent = float(exponent)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = features["sentence_embedding"].float()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        features["sentence_embedding"] = x * norm**-self.exponent
        return features

    def save(self, output_path: str, *args, safe_serialization: bool = True, **kwargs) -> None:
        self.save_config(output_path)
