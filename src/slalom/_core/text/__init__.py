"""Text for people: code, messages, suggestions and figures."""
