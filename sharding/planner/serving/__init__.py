"""How a mixture is served with attention and experts on devices of their own, in arithmetic."""
