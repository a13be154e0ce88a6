"""Keeps torch on one thread, as the hosts do."""

import torch

torch.set_num_threads(1)
