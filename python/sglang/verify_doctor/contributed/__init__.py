"""One module for each part of the fork that adds to the doctor; see ``sglang.verify_doctor.registry``."""
