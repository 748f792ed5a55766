"""What a block is: its layout, its keys and names, where its bytes lie, and the formats it is stored in.

Pure: nothing here waits, allocates device memory or touches a file.
"""
