"""rayfed: simulation of federated learning on non-IID data, on Ray."""
