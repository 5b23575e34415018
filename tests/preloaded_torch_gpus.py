"""What the server has imported that ranks of PyTorch programs on stand-in GPUs are forked from."""

from torch_gpus import stand_in_torch

stand_in_torch.start()

import preloaded_torch  # noqa: E402, F401 - torch comes after the stand-ins
