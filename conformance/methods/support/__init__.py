"""What those tests share."""
