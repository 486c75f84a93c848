"""A small HTTP server in front of a trained model, with the endpoints of OpenAI's API."""
