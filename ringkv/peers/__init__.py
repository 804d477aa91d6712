"""Other libraries' caches behind the contract. Each module needs its library; the extra ``peers`` installs them."""
