"""Python runs this when it starts: `import torch` then finds the device of stand_in_torch.py."""

import os

if "PROCGROUP_STAND_IN_TORCH" in os.environ:
    from torch_gpus import stand_in_torch

    stand_in_torch.start_with_torch()
