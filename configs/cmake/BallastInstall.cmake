# Install rules and the package file.
# SPDX-License-Identifier: Apache-2.0
