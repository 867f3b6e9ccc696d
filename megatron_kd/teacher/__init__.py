"""Teachers: what they say about each token, exactly and once."""
