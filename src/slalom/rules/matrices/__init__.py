"""Rules for matrices: orthogonalized updates, Kronecker factors, and low ranks."""
