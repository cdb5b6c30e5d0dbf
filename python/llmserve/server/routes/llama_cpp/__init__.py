"""llama.cpp's own protocol: POST /completion."""
