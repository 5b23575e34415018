"""Training on many ranks: device meshes."""
