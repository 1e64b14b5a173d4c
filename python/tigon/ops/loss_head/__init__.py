"""Losses of a linear layer without storing its full logits.

A public function checks its arguments, packs those of all heads into ``options.HeadOptions`` and calls
``operands.native_call``. This makes a ``HeadCall``: operands, formula and memory options, as every native
operator on a head takes them. ``autograd.HeadLoss`` runs it and returns gradients. If a Python function
(``linear_loss``) or an exchange (``tigon.parallel``) runs between the matmuls, ``driver.RowPass`` loops over
the chunks. ``labels`` finds the rows that count, ``plan`` computes the memory of a call, and ``reference``
holds the formula in PyTorch operations. ``multi_token`` runs several heads in turn, ``top_k`` distils from a
few classes, and ``contrastive`` uses documents as classes.
"""
