"""Files, processes, HTML: helpers that know nothing of memory."""
