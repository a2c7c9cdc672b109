"""The settings of the vision lane. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offsphere.names import PAIR_LOSSES, VIEW_LOSSES
from offsphere.run.config import added
from offsphere.run.help import Groups
from offsphere.training.settings import ImageSettings, check_setting

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[(*VIEW_LOSSES, *PAIR_LOSSES)]


@dataclass(frozen=True)
class SimclrSettings(ImageSettings):
    GROUPS: ClassVar[Groups] = {"training": ((), ("view_norm",))}

    lr: float = 8e-3
    """Peak learning rate, before lr_rule; the best of four on validation data
    (configs/studies/default_rate.yaml)."""
    loss: LossName = "nt_xent"
    """nt_xent is SimCLR's own; dcl and dhel are its decoupled kin; the others have no within-view
    negatives."""
    view_norm: Literal["stacked", "separate"] = added("stacked")
    """Batch-norm takes its statistics from both views together (2m images), or, as in the papers'
    code, from each view alone (m), whose running statistics then move twice a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.view_norm == "separate" and self.norm == "group":
            raise ValueError(
                "--view-norm=separate has no effect with --norm=group: no batch-norm is left."
            )


@dataclass(frozen=True)
class MocoSettings(ImageSettings):
    GROUPS: ClassVar[Groups] = {"question": (("queue_size",), ("momentum", "key_groups"))}

    queue_size: int = 2048
    """Keys in the queue; at most the training images less one batch."""
    momentum: float = 0.99
    """How slowly the key encoder follows (0.999 for long training)."""
    key_groups: int = 4
    """Keys pass batch-norm in this many shuffled groups, so that it cannot give them away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "momentum", "between 0 and 1", 0 <= self.momentum <= 1)
        good = self.norm == "group" or self.key_groups >= 1  # without batch-norm it is not used
        check_setting(self, "key_groups", "at least 1", good)
        if self.negatives is not None:
            raise ValueError(
                f"--negatives={self.negatives} divides a batch into groups, but MoCo's negatives "
                "come from its queue: change --queue-size."
            )
        if self.queue_size <= self.batch_size:
            raise ValueError(
                f"--queue-size={self.queue_size} must be above --batch-size={self.batch_size}: "
                "the queue would hold nothing but the keys of its own batch."
            )
