"""vLLM engines: start, watch and replace them, put weights into them while they run, and share their load."""
