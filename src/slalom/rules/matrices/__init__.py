"""Rules for matrices: orthogonalized updates and Kronecker factors."""
