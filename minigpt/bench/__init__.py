"""Speed on this machine, compared with transformers and with the limit that memory sets."""
