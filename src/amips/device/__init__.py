"""torch on a device of the caller's: which one, tensors on their way there, exact search on it.

Importing this room imports torch. `exact` does so when a device is asked for, `learn` always.
"""

from amips.resources import check_address_space

check_address_space(640 << 20)  # torch and its threads take so much; without it, loading ends in a signal

from amips.device.moving import Ahead, ahead, as_tensor, moved, pinned  # noqa: E402
from amips.device.places import device_named, full_precision, settle  # noqa: E402
from amips.device.torch_engine import TorchEngine  # noqa: E402

__all__ = [
    "Ahead",
    "TorchEngine",
    "ahead",
    "as_tensor",
    "device_named",
    "full_precision",
    "moved",
    "pinned",
    "settle",
]
