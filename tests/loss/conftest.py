"""torch works on small tensors here: one thread each is fastest, and runs in parallel do not fight."""

import torch

torch.set_num_threads(1)
