"""Plugins of asv, named in asv.conf.json; each mends one thing that asv 0.6 does not do for throughput on a GPU host.

`host_env`   one checkout a commit in front of the running interpreter's path, nothing built
`direction`  higher is better, in compare, continuous and publish
`rounds`     a round is a fresh process, and files are written whole
`machine`    the device names the machine, without questions
"""
