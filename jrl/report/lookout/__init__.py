"""What a run is watched for while it goes."""
