"""nvserve: serve large language models from the GPUs of one machine."""
