"""One module per op: eager reference, fake kernels, autograd, public function."""
