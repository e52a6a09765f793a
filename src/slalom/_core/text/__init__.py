"""What people read: paths, code, messages, figures, and the methods of transforms."""
