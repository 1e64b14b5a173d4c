"""The forms that :func:`tigon.apply` recognises: modules and rotary functions, as models write them."""
