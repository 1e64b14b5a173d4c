"""The products of a chunk of rows by themselves, for what comes between them."""

from __future__ import annotations

from tigon._op import raw

_logits = raw("linear_product_logits", lambda *_: None, "linear_cross_entropy")
_gradients = raw("linear_product_gradients", lambda *_: None, "linear_cross_entropy")
_NO_LORA = (None, None, 1.0)


def form_logits(logits, hidden, weight, lora=_NO_LORA) -> None:
    """``logits = hidden @ weight.T``; `lora`: A, B and scale of a second product."""
    _logits(logits, hidden, weight, *lora)


def form_gradients(
    dlogits,
    hidden,
    weight,
    *,
    dhidden=None,
    dweight=None,
    dbias=None,
    factor=None,
    first=True,
    add_dweight=False,
    lora=_NO_LORA,
    dlora_a=None,
    dlora_b=None,
) -> None:
    """Of ``factor * dlogits`` the gradients that are given, written by the `first` call and then added to.

    Args:
        hidden: only its shape is looked at where no gradient of a parameter is given.
        add_dweight: dweight is added to by the first call too.
    """
    outputs = dhidden, dweight, dbias, factor, first, add_dweight
    _gradients(dlogits, hidden, weight, *outputs, *lora, dlora_a, dlora_b)
