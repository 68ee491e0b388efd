"""``python -m mindspeed_llm.tools.doctor``: what of this machine, its software, network and storage would hurt a run.

A check is a small function in the ``CHECKS`` of a section: :mod:`software`, :mod:`machine`, :mod:`network`,
:mod:`variables`, :mod:`storage`. It looks at the :class:`~mindspeed_llm.tools.doctor.finding.Surroundings` and yields
findings. What needs torch or megatron-core is seen in a child process (:mod:`probe`), so that a broken installation is
a finding, too; under a launcher :mod:`ranks` compares the processes of all nodes.
"""
