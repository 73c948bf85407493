"""What is put into MindSpeed's own modules: recipes of ours in its linears and experts.

    patch_points   the names in MindSpeed that this relies on, and whether they are as expected
    linear         its parallel linears
    experts        its grouped experts
    claim          which of a model's layers are taken over

Importing the last three imports MindSpeed and Megatron.
"""
