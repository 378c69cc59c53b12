"""Which experts will be needed: every predictor behind one protocol, and what it may see when it decides."""
