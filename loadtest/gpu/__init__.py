"""Every GPU test and benchmark in one command, for a CUDA machine without Ray or a web server.

python -m loadtest.gpu --out DIR
"""
