"""What people read: code, messages, suggestions and figures."""
