"""Changed files of every kind and odd settings: only flowdup's own errors may come of them."""
