"""How fast is it on this machine, beside transformers and the limit that memory sets?"""
