"""The methods of transforms, such as `.mask`, in files like the rooms of the wrappers."""
