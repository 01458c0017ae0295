"""What is trained and sent: tensors by name."""

from torch import Tensor

Params = dict[str, Tensor]
