"""Tests against programs that others wrote; they fetch those programs, so `-m interop` asks for them."""
