"""The config.json of Hugging Face's transformers, read as a model's shape and written from one."""
