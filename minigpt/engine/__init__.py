"""The same numbers sooner: faster products, packed and int8 weights, compiled steps."""
