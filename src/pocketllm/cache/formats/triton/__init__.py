"""The Triton pieces of the KV formats, one file a format. Imported only where Triton kernels run."""
