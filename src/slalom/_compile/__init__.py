"""The compile wrapper behind `opt.step` and `sl.train_step`, and how it treats meshes."""
