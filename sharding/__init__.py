"""Where arrays live: a layout of the devices, and the mesh folded from it."""
