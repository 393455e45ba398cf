"""From a critic: generalised advantage estimation."""
