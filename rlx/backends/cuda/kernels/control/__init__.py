"""Control flow: subgraphs are launches that the host queues; tensors stay on the device."""
