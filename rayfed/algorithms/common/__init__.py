"""What algorithms are made of: pieces that several share, and those of the larger ones. No algorithm is in here."""
