"""What both hosts' engines share: point-to-point channels, agreement on failures, action records."""
